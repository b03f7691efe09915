"""From printed text to token ids: control tokens by table, each run of text between them by one BPE pass."""
