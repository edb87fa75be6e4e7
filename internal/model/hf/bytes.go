package hf

import (
	"encoding/json"
	"os"

	"github.com/cprun/cprun/internal/text/tokenizer"
)

// eosText ends a document in the tokenizer of bytes, as in GPT-2.
const eosText = "<|endoftext|>"

// writeBytes writes a tokenizer of bytes for transformers and cprun: byte-level BPE without merges, with each byte's
// value as its id. eos is the id of a further token that ends documents; -1 for none.
func writeBytes(to *os.Root, eos int) error {
	vocab := map[string]int{}
	for b, visible := range tokenizer.ByteRunes {
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
	file := map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": added, "normalizer": nil,
		"pre_tokenizer": level, "post_processor": nil, "decoder": level,
		"model": map[string]any{
			"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil,
			"end_of_word_suffix": nil, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
			"vocab": vocab, "merges": []string{},
		},
	}
	if err := writeJSON(to, "tokenizer.json", file); err != nil {
		return err
	}
	return writeJSON(to, "tokenizer_config.json", settings)
}

// maxBytesLength allows texts of any length; transformers writes this number.
var maxBytesLength = json.Number("1000000000000000019884624838656")
