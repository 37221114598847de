"""A plan beside what production made of it."""
