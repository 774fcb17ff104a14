"""`shoal simulate`: policies of balancing compared on traces of real requests."""
