"""Orbax's extension points; the only folder that imports orbax."""
