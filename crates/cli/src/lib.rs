//! The tensorwire command.
