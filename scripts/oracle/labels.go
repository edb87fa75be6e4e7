//go:build ignore

// Command labels encodes a file of records by a tokenizer and a chat template, and prints {ids, labels, notes} of each.
package main

import (
	"context"
	"encoding/json"
	"os"

	"github.com/cprun/cprun/internal/text/data"
)

func main() {
	out := json.NewEncoder(os.Stdout)
	for _, record := range os.Args[3:] { // one record in each file
		var notes data.Keys
		e := data.Encoding{Tokenizer: data.NewTokenizer(os.Args[1], 0), EOS: -1, Notes: &notes,
			Chat: data.NewChat(os.Args[1], os.Args[2], false)}
		row := map[string]any{}
		err := e.Each(context.Background(), []string{record}, func(_ int, d data.Document) error {
			row = map[string]any{"ids": d.IDs, "labels": d.Labels}
			return nil
		})
		if err != nil {
			row["error"] = err.Error()
		}
		row["notes"] = notes.Sorted()
		out.Encode(row)
	}
}
