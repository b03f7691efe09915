"""The tokenizer turns printed text into token ids: control tokens by table, the text between them by BPE."""
