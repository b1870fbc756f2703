"""Changes that an installed CPU build of vLLM needs: `changes` finds them, `consent` asks first."""
