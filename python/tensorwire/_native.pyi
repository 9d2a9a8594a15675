"""The part of tensorwire that is written in Rust. Import its names from ``tensorwire``."""

__version__: str
