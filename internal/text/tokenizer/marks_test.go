package tokenizer

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// The Python library has the offsets of all tokens (scripts/oracle/chat.py).
func TestMarksEqualOffsets(t *testing.T) {
	raw := must.Have(os.ReadFile("testdata/marks.json"))
	var file struct {
		Text  string
		Marks map[string][][2]int
	}
	must.Do(t, json.Unmarshal(raw, &file))
	tokenizers := oracles(t)
	for name, want := range file.Marks {
		tok := must.Have(Parse(tokenizers[name].Tokenizer))
		marks := make([]Mark, 0, len(want))
		for at := range file.Text {
			marks = append(marks, Mark{At: at})
		}
		marks = append(marks, Mark{At: len(file.Text)})
		e := tok.NewEncoder()
		ids, err := e.AppendMarked([]int32{7}, file.Text, marks)
		whole, err2 := e.Append(nil, file.Text)
		inner := whole[len(tok.head) : len(whole)-len(tok.tail)]
		if err != nil || err2 != nil || ids[0] != 7 || !slices.Equal(ids[1:], inner) {
			t.Fatalf("%s: %v, %v, %v, want %v", name, ids, err, err2, inner)
		}
		for i, m := range marks {
			if m.Before != want[i][0] || m.After != want[i][1] {
				t.Errorf("%s: before %.12q: %d and %d, want %v", name, file.Text[m.At:], m.Before, m.After, want[i])
			}
		}
	}
}

func TestMarksOfEdges(t *testing.T) {
	tok := must.Have(Parse(oracles(t)["llama3"].Tokenizer))
	marks := []Mark{{At: 0}, {At: 0}}
	if ids, err := tok.NewEncoder().AppendMarked(nil, "", marks); err != nil || len(ids) != 0 || marks[1] != (Mark{}) {
		t.Error(ids, marks, err)
	}
	if _, err := tok.NewEncoder().AppendMarked(nil, "a\xff", marks); err == nil {
		t.Error("not UTF-8")
	}
	if !slices.Contains(tok.Specials(), "<|eot_id|>") && len(tok.Specials()) == 0 {
		t.Error("no special tokens")
	}
}
