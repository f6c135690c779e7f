"""Servers whose parts are killed, stopped and starved under load, by a seeded schedule; every answer is compared."""
