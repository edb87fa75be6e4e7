// Package tokenizer turns text into token ids, and ids into text, by a Hugging Face tokenizer.json. The ids equal those
// of the Python library tokenizers with add_special_tokens on; the entries truncation and padding are ignored.
//
// Parse reads a file; Tokenizer.NewEncoder returns an Encoder for one goroutine, and Encoder.Append the ids of a text.
//
// A text passes five steps: added tokens are cut out; the normalizer rewrites the text between them; the pre-tokenizer
// cuts it into words; the model turns words into ids; the post-processor adds special tokens around the text. Unknown
// components are refused by name, since without them the ids would differ.
//
// Words pass the steps one by one, so that memory stays at a few times the length of the text. Patterns run on a
// matcher that bounds its steps (regexp.go).
package tokenizer
