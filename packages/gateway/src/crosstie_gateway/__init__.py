"""Crosstie for who serves: one endpoint over a fleet, its keys and usage, its replicas and how many there should be."""
