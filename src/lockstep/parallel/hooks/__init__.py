"""Hooks that users set on parameters: taken off before sharding, tried for linearity, called with full gradients."""
