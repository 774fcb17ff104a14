"""Index scores."""
KEY_TILE = 64
