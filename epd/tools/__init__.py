"""Commands beside the proxy: `epd up`, `doctor`, `top` and `bench`. They serve no requests."""
