"""Who am I, which device, how do we talk."""
