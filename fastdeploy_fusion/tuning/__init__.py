"""How ``tune`` measures and decides: ``search`` and ``regret`` are pure, ``sides`` and ``bench`` run on every rank."""
