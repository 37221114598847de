"""What marks an answer as emulated, so that nobody takes it for one of hardware."""

# Emulated replicas give it as their version, the owner of their models and the fingerprint of their answers; what
# measures endpoints looks for it.
FINGERPRINT = "crosstie-emulated"
