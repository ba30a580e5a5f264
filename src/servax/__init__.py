"""servax."""
