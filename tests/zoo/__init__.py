"""Tasks for `lockstep verify`: broken ones, each with a classic mistake, and healthy ones."""
