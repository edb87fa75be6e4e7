package hf

import (
	"encoding/json"
	"os"
)

// eosText is what ends a document in the tokenizer of a model of bytes, as GPT-2 writes it.
const eosText = "<|endoftext|>"

// writeBytes writes the tokenizer of a model whose tokens are bytes, as transformers and cprun read
// it: byte-level BPE without a merge, in which the id of a byte is its value. eos is the id of a
// further token that ends documents; -1 for none.
func writeBytes(to *os.Root, eos int) error {
	vocab := map[string]int{}
	for b, visible := range visibleBytes() {
		vocab[string(visible)] = b
	}
	added := []map[string]any{}
	settings := map[string]any{
		"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
		"model_max_length": maxBytesLength,
	}
	if eos >= len(vocab) {
		vocab[eosText] = eos
		added = append(added, map[string]any{
			"id": eos, "content": eosText, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
			"special": true,
		})
		settings["eos_token"] = eosText
	}
	level := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
	tokenizer := map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": added, "normalizer": nil,
		"pre_tokenizer": level, "post_processor": nil, "decoder": level,
		"model": map[string]any{
			"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []string{},
		},
	}
	if err := writeJSON(to, "tokenizer.json", tokenizer); err != nil {
		return err
	}
	return writeJSON(to, "tokenizer_config.json", settings)
}

// maxBytesLength says that no text is too long, as transformers writes it.
var maxBytesLength = json.Number("1000000000000000019884624838656")

// visibleBytes returns the character that GPT-2's tokenizers write for each byte: itself, where it can be
// seen, else one of those from U+0100 on.
func visibleBytes() (all [256]rune) {
	next := rune(256)
	for b := range all {
		if r := rune(b); r > ' ' && r <= '~' || r >= 0xa1 && r <= 0xac || r >= 0xae {
			all[b] = r
			continue
		}
		all[b] = next
		next++
	}
	return all
}
