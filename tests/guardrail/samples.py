"""One text to find for each rule, put together here so that no file holds a whole key."""

import itertools

from workers.guardrail.rails import PatternRail, rail_for

KEY = "".join(itertools.islice(itertools.cycle("aB3xK9mQ7zP2"), 200))

SAMPLES = {
    "private_key": "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEow+/IBAAK=\n-----END RSA PRIVATE KEY-----",
    "aws_access_key": "AKIA" + "IOSFODNN7EXAMPLE",
    "github_token": "ghp_" + KEY[:36],
    "gitlab_token": "glpat-" + KEY[:20],
    "slack_token": "xoxb-" + "1234567890-" + KEY[:24],
    "google_key": "AIza" + KEY[:35],
    "stripe_key": "sk_live_" + KEY[:24],
    "anthropic_key": "sk-ant-api03-" + KEY[:40],
    "openai_key": "sk-proj-" + KEY[:40],
    "huggingface_token": "hf_" + KEY[:34],
    "registry_token": "npm_" + KEY[:36],
    "json_web_token": "eyJhbGciOiJI" + ".eyJzdWIiOiIxMjM0" + ".x7-_y",
    "bearer_token": KEY[:32],
    "url_password": "pa55",
    "credential": "hunter2Xq",
    "email": "Ada.L+news@mail.example.co.uk",
    "card": "4111 1111-1111 1111",
    "iban": "DE89 3704 0044 0532 0130 00",
    "phone_international": "+49 (0)30 901820",
    "phone_us": "(555) 234-5678",
    "phone_national": "020 7946 0958",
    "us_ssn": "123-45-6789",
}

# What has to stand before or behind a sample for its rule to see it.
AROUND = {"bearer_token": ("Bearer ", ""), "url_password": ("db://me:", "@h/"), "credential": ("password = ", "")}


def in_place(name: str) -> str:
    """The sample with what has to be around it."""
    before, behind = AROUND.get(name, ("", ""))
    return before + SAMPLES[name] + behind


def redacting() -> PatternRail:
    """All rules, all redacting."""
    rail = rail_for({"secrets": "redact", "personal": "redact"})
    assert isinstance(rail, PatternRail)
    return rail
