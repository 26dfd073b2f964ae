"""The ground floor: bytes and a clock in, trusted objects or an error out. Imports no other room."""
