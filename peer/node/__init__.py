"""One running peer: sessions, bulk bytes, bans and budgets."""
