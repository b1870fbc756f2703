"""Commands beside the proxy: `epd up`, `doctor`, `top` and `bench`. No request enters them."""
