//! The Python module tensorwire._native.
