"""A plugin of `crosstie serve`: a guard against personal data, and a filter of pools (docs/plugins.md)."""

import re

# Linear in the length of a prompt, whatever is in it.
_MAIL = re.compile(rb"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{1,190}")
_CARD = re.compile(rb"\b(?:\d[ -]?){13,16}\b")


class InHouse:
    patience_s = 0.25
    on_failure = "refuse"

    def check(self, request):
        """None: it passes; text: why it does not; bytes: the body in the place of its own."""
        if _CARD.search(request["body"]):
            return "a prompt must not have card numbers"
        masked = _MAIL.sub(b"(an e-mail address)", request["body"])
        return masked if masked != request["body"] else None

    def pools(self, request, pools):
        """Names of those that may have it: the fleet's policy chooses among them."""
        own = [pool["name"] for pool in pools if not pool["name"].startswith("rented-")]
        return own if request["class"] == "internal" else [pool["name"] for pool in pools]
