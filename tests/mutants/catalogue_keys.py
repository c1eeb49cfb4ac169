"""Faults in who is let in, in whose name, and in what the operator has set."""

from __future__ import annotations

from kinds import Mutant

_KEYS = "server/test_keys.py::test_"
_SETTINGS = "server/test_settings.py::test_"

MUTANTS = (
    Mutant(
        "the search for a key stops where it is found",
        ("access",),
        "server/keys.py",
        "                found = tenant\n",
        "                return tenant\n",
        (_KEYS + "a_key_is_compared_with_every_hash_in_constant_time",),
    ),
    Mutant(
        "hashes are compared byte by byte",
        ("access",),
        "server/keys.py",
        "if hmac.compare_digest(known, digest):",
        "if known == digest:",
        (_KEYS + "a_key_is_compared_with_every_hash_in_constant_time",),
    ),
    Mutant(
        "paths that begin as the open one are open",
        ("access",),
        "server/authentication.py",
        'scope["path"] in _OPEN_PATHS',
        'scope["path"].startswith("/health")',
        (_KEYS + "everything_but_health_needs_a_key",),
    ),
    Mutant(
        "what a browser sends of itself is good for changing things",
        ("access",),
        "server/authentication.py",
        'elif scheme.lower() == b"basic" and _is_page(scope):',
        'elif scheme.lower() == b"basic":',
        (_KEYS + "a_browser_may_look_at_the_dashboard_with_its_own_dialogue",),
    ),
    Mutant(
        "of two keys one is enough",
        ("access",),
        "server/authentication.py",
        "return keys.pop() if len(keys) == 1 else None",
        "return keys.pop() if keys else None",
        (_KEYS + "without_a_valid_key_nothing_is_told",),
    ),
    Mutant(
        "every key is that of one tenant",
        ("access", "key completeness"),
        "server/authentication.py",
        "{**scope, _TENANT: tenant}",
        "{**scope, _TENANT: DEFAULT_TENANT}",
        (
            _KEYS + "a_key_gives_its_tenant",
            "server/test_server_security.py::test_whether_another_has_asked_the_same_cannot_be_told",
        ),
    ),
    Mutant(
        "what stands in place of a hash is shown when it is none",
        ("access",),
        "server/setting_types.py",
        '"api_key", "key_hashes"',
        '"api_key", "key_hash"',
        (_SETTINGS + "a_key_in_a_file_is_refused_and_not_shown",),
    ),
    Mutant(
        "an empty key is a key",
        ("access",),
        "server/setting_types.py",
        "if not text or any(c.isspace() for c in text):",
        "if any(c.isspace() for c in text):",
        (_SETTINGS + "a_key_that_anyone_could_send_is_refused",),
    ),
    Mutant(
        "the file's word outweighs a flag's in what is printed",
        ("mirrors",),
        "server/layers.py",
        "        self.origins[section, name] = place\n",
        "        self.origins.setdefault((section, name), place)\n",
        (_SETTINGS + "each_layer_outweighs_the_one_below",),
    ),
)
