"""From the first call of a kind to its graphs: counted, rehearsed, recorded."""
