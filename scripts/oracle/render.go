//go:build ignore

// Command render renders lines of JSON {template, vars} and prints {text, spans} or {error} for each.
package main

import (
	"bufio"
	"encoding/json"
	"os"
	"time"

	"github.com/cprun/cprun/internal/text/chat"
)

func main() {
	now, err := time.Parse(time.RFC3339, os.Args[1])
	if err != nil {
		panic(err)
	}
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		var job struct {
			Template string
			Vars     json.RawMessage
		}
		if err := json.Unmarshal(line, &job); err != nil {
			panic(err)
		}
		var result struct {
			Text  string
			Spans []chat.Span
			Error string
		}
		t, err := chat.Compile(job.Template)
		if err == nil {
			t.Now = now
		}
		if err == nil {
			v, derr := chat.Decode(job.Vars)
			if derr != nil {
				panic(derr)
			}
			result.Text, result.Spans, err = t.Render(v.(*chat.Dict).Data)
		}
		if err != nil {
			result.Error = err.Error()
		}
		out.Encode(result)
	}
}
