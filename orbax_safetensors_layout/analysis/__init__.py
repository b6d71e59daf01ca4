"""Read-only reports on checkpoints: inspect, verify, compare and cluster estimates."""
