"""The operators inside other frameworks. Each module imports its framework; nothing here is imported by flux_ops."""
