"""Whether two endpoints give the same model."""
