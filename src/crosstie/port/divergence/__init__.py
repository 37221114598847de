"""The first module whose outputs differ between two machines."""
