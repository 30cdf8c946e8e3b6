"""What peers answer for: trust, evidence, bans, and their own promises."""
