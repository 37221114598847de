"""What of a machine an engine would trip over."""
