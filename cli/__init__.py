"""adapterctl: the command. May import every other folder, always inside the function that needs it."""
