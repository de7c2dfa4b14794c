"""HTTP only: one file per resource, from a request to a store function and back to JSON."""
