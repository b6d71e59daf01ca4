"""Pure plans: what will be read, printable and costable without touching a file or a device."""
