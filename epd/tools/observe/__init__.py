"""`epd observe`: what an encoder cache would bring, counted in front of plain vLLM servers."""
