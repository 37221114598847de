"""The loop on one machine: what is predicted is measured where it is least known, learnt, and planned with again."""
