// Package tokenizer turns text into token ids by a Hugging Face tokenizer.json, with the ids that
// the Python library tokenizers gives (add_special_tokens on; truncation and padding of the file
// are not applied).
//
// A text goes through five steps: added tokens are cut out, each stretch between them is
// normalized, cut into words by the pre-tokenizer, turned into ids by the model, and the
// post-processor puts special tokens around all. A component that is not known is refused by
// its name, since leaving it out would give other ids.
//
// Words go from step to step one by one, so that the memory for a text is a few times its
// length, whatever it holds. Patterns run on a matcher that counts its steps (regexp.go).
package tokenizer
