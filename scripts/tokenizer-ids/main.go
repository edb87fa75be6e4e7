// Command tokenizer-ids prints the token ids of texts. scripts/oracle/tokenizer_ids.py compares them with the Python
// library's.
//
//	tokenizer-ids TOKENIZER.JSON <LINES
//
// Each input line is a JSON string, each output line a JSON list.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/text/tokenizer"
)

func main() {
	if err := run(os.Args[1], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run encodes each line of in.
func run(path string, in io.Reader, out io.Writer) error {
	raw, err := files.Read(path, tokenizer.MaxFile)
	if err != nil {
		return err
	}
	t, err := tokenizer.Parse(raw)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	e, w := t.NewEncoder(), bufio.NewWriter(out)
	for lines := json.NewDecoder(in); ; {
		var text string
		if err := lines.Decode(&text); errors.Is(err, io.EOF) {
			return w.Flush()
		} else if err != nil {
			return err
		}
		ids, err := e.Append([]int32{}, text)
		if err := json.NewEncoder(w).Encode(ids); err != nil {
			return err
		}
		if err != nil {
			return fmt.Errorf("%.100q: %w", text, err)
		}
	}
}
