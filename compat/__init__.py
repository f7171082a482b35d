"""Old dialects over commlib: one module a dialect, one statement a call."""
