"""Turns: what only one thread at a time may do.

transformers imports its parts when they are first asked for, and they import one another: threads
that do so at once find each other's halves, and an ImportError. Importing all of it beforehand
would cost seconds where no tokenizer is loaded.

Owns the locks. Never loads anything.
"""

import threading

TOKENIZERS = threading.RLock()
"""Held while a tokenizer is loaded or written, and while the parts of transformers for that are
imported."""
