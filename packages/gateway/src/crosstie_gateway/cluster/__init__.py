"""What a Kubernetes API server says of pods and their addresses: watched, and told as endpoints."""
