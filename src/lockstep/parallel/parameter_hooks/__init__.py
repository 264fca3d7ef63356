"""Parameter hooks of users: removed before sharding, tested for linearity, and called with full gradients."""
