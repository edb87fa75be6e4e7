package verify

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/parquet-go/parquet-go"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/text/chat"
	"github.com/cprun/cprun/internal/text/tokenizer"
)

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must.Do(t, os.WriteFile(path, []byte(text), 0o666))
	return path
}

// Files are records or text by their names, or by their contents.
func TestKindsOfFiles(t *testing.T) {
	const one, two = `{"text": "ab"}`, `{"text": "c"}`
	for _, c := range []struct{ name, text, want string }{
		{"a.jsonl", one + "\n\n" + two, "ab|c"}, {"a.JSONL", one, "ab"}, {"a.ndjson", one + "\r\n" + two, "ab|c"},
		{"a.jsonlines", one, "ab"}, {"a.json", "[" + one + ",\n" + two + "]", "ab|c"}, {"a.json", one, "ab"},
		{"a.json", `{"data": [` + one + "]}", "ab"}, {"a.json", "{\n \"text\":\n \"ab\"\n}", "ab"},
		{"a.jsonl", "\ufeff" + one, "ab"}, {"a.data", one + "\n" + two, "ab|c"}, {"noext", "\ufeff[" + one + "]", "ab"},
		{"a.txt", one, one}, {"a.md", "# ab", "# ab"}, {"a.c", "{x} y", "{x} y"}, {"a.log", "[1] two", "[1] two"},
		{"a.jsonl", `{"x": NaN, "text": "a NaN", "y": [-Infinity, Infinity, "\"NaN\\"], "z": 1.5}`, "a NaN"},
		{"a.jsonl", `{"id": 123456789012345678901234567890, "text": "ab"}`, "ab"},
	} {
		cfg := ofBytes(len(c.want), writeFile(t, c.name, c.text))
		cfg.Data.EOSTokenID = '|'
		got, err := Records(cfg, cfg.Data.SeqLen, []int64{0})
		var text []byte
		for _, r := range got[0] {
			text = append(text, byte(r.ID))
		}
		if err != nil || string(text) != c.want {
			t.Errorf("%s %q: %q, %v, want %q", c.name, c.text, text, err, c.want)
		}
	}
}

// Borders of other packers begin documents.
func TestBordersOfOtherPackers(t *testing.T) {
	want := []Row{{1, 2, 0, 0}, {2, -1, 1, 0}, {3, 4, 0, 1}, {4, 5, 1, 1}, {5, -1, 2, 1}, {6, 7, 0, 2}}
	for _, borders := range []string{`"seq_lengths": [2, 3, 2]`, `"cu_seqlens": [0, 2, 5, 7]`,
		`"document_ids": [4, 4, 1, 1, 1, 4, 4]`, `"segment_ids": [1, 1, 2, 2, 2, 3, 3]`,
		`"position_ids": [0, 1, 0, 1, 2, 0, 1]`} {
		cfg := ofBytes(6, writeFile(t, "a.jsonl", `{"input_ids": [1, 2, 3, 4, 5, 6, 7], `+borders+"}"))
		cfg.Data.EOSTokenID, cfg.Data.PackDocuments = -1, true
		if got, err := Records(cfg, 6, []int64{0}); err != nil || !slices.Equal(got[0], want) {
			t.Errorf("%s: %v, %v, want %v", borders, got[0], err, want)
		}
	}
}

// golden reads a record, given its text with targets in brackets [[ ]], and compares all targets.
func golden(t *testing.T, name, template, on, file, text string) {
	t.Helper()
	r := newReading(chatDir+"tokenizer.json", template, on)
	r.cfg.Data.Path = config.Files{{Path: file}}
	c := must.Have(newTalk(&r.cfg.Data))
	whole, marks := "", []tokenizer.Mark(nil)
	for i, part := range strings.Split(strings.ReplaceAll(text, "]]", "[["), "[[") {
		if whole += part; i%2 == 1 {
			marks = append(marks, tokenizer.Mark{At: len(whole) - len(part)}, tokenizer.Mark{At: len(whole)})
		}
	}
	ids := must.Have(c.encoder.AppendMarked(nil, whole, marks))
	want := make([]Row, len(ids))
	for i, id := range ids {
		want[i] = Row{ID: id, Target: -1, Position: int32(i)}
	}
	for turn := range slices.Chunk(marks, 2) {
		for i := turn[0].Before; i < turn[1].After; i++ {
			if i > 0 {
				want[i-1].Target = ids[i]
			}
		}
	}
	got, err := wholeRecords(r.cfg, 1<<20, []int64{0}, [][]Row{want})
	if err != nil || !slices.Equal(got[0], want) {
		t.Errorf("%s: %v\n%v\nwant\n%v", name, err, got[0], want)
	}
}

// Keys of turns and records decide what is trained and shown.
func TestKeysOfConversations(t *testing.T) {
	t.Parallel()
	plain := writeFile(t, "plain.jinja", "{% if tools %}{{ tools[0].name }}({{ tools[0].parameters | tojson }})\n{% endif %}"+
		"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"+
		"{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
	marked := writeFile(t, "marked.jinja", "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"+
		"{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}")
	turn := func(role, content, more string) string {
		return fmt.Sprintf(`{"role": %q, "content": %q%s}`, role, content, more)
	}
	said := func(role, content string) string { return "<|im_start|>" + role + "\n" + content + "<|im_end|>\n" }
	learned := func(content string) string { return "<|im_start|>assistant\n[[" + content + "<|im_end|>]]\n" }
	user := said("user", "how are you")
	for _, flag := range []string{`"weight": 0`, `"weight": 0.0`, `"loss": false`, `"train": false`, `"trainable": false`,
		`"weight": 1, "train": false`} {
		file := writeFile(t, "a.jsonl", `{"messages": [`+strings.Join([]string{turn("user", "how are you", ""),
			turn("assistant", "the first", ", "+flag), turn("user", "how are you", ""),
			turn("assistant", "the second", `, "weight": 1`)}, ", ")+"]}")
		for _, template := range []string{plain, marked} {
			golden(t, flag+" "+filepath.Base(template), template, "assistant", file,
				user+said("assistant", "the first")+user+learned("the second"))
		}
	}
	file := writeFile(t, "a.jsonl", `{"system": "be short", "functions": "[{\"name\": \"f\", \"parameters\": {\"a\": null}}]", `+
		`"conversations": [{"from": "human", "value": "how are you"}, {"from": "function_call", "value": "f()"}, `+
		`{"from": "observation", "value": "7"}, {"from": "gpt", "value": "seven"}]}`)
	golden(t, "ShareGPT", plain, "assistant", file, `f({"a": null})`+"\n"+said("system", "be short")+user+learned("f()")+
		said("tool", "7")+learned("seven"))
	golden(t, "ShareGPT", plain, "all", file, `[[f({"a": null})`+"\n"+said("system", "be short")+user+said("assistant", "f()")+
		said("tool", "7")+said("assistant", "seven")+"]]")
	file = writeFile(t, "a.jsonl", `{"system": "a", "conversations": [{"from": "system", "value": "a"}, `+
		`{"from": "gpt", "value": "b"}]}`)
	golden(t, "one system", plain, "assistant", file, said("system", "a")+learned("b"))
	file = writeFile(t, "a.jsonl", `{"messages": [`+turn("user", "how are you", `, "loss": false`)+", "+
		turn("assistant", "b", "")+"]}")
	golden(t, "all but one", plain, "all", file, user+"[["+said("assistant", "b")+"]]")
}

// Columns whose type is JSON have its values, with their nulls. Other nulls are left out.
func TestColumnsOfJSON(t *testing.T) {
	const tools = `[{"name": "f", "parameters": {"b": 1, "a": null}}]`
	want := `{"messages":[{"role":"user","content":"x","weight":2}],"tools":[{"name":"f","parameters":{"b":1,"a":null}}],` +
		`"n":[1,2],"ok":true,"half":0.5}`
	isJSON := arrow.NewMetadata([]string{nameKey}, []string{"arrow.json"})
	message := arrow.StructOf(arrow.Field{Name: "role", Type: arrow.BinaryTypes.String},
		arrow.Field{Name: "content", Type: arrow.BinaryTypes.LargeString, Nullable: true},
		arrow.Field{Name: "weight", Type: arrow.PrimitiveTypes.Int8}, arrow.Field{Name: "name", Type: arrow.BinaryTypes.String, Nullable: true})
	schema := arrow.NewSchema([]arrow.Field{{Name: "messages", Type: arrow.ListOf(message)},
		{Name: "tools", Type: arrow.BinaryTypes.String, Metadata: isJSON}, {Name: "n", Type: arrow.ListOf(arrow.PrimitiveTypes.Int32)},
		{Name: "ok", Type: arrow.FixedWidthTypes.Boolean}, {Name: "half", Type: arrow.PrimitiveTypes.Float32}}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	row, _ := json.Marshal(map[string]any{"messages": []any{map[string]any{"role": "user", "content": "x", "weight": 2}},
		"tools": tools, "n": []int{1, 2}, "ok": true, "half": 0.5})
	must.Do(t, b.UnmarshalJSON(row))
	var buf bytes.Buffer
	w := ipc.NewWriter(&buf, ipc.WithSchema(schema))
	must.Do(t, w.Write(b.NewRecordBatch()))
	w.Close()
	type said struct {
		Role    string  `parquet:"role"`
		Content string  `parquet:"content"`
		Weight  int32   `parquet:"weight"`
		Name    *string `parquet:"name,optional"`
	}
	type columns struct {
		Messages []said  `parquet:"messages,list"`
		Tools    string  `parquet:"tools,json"`
		N        []int64 `parquet:"n,list"`
		OK       bool    `parquet:"ok"`
		Half     float32 `parquet:"half"`
	}
	pq := filepath.Join(t.TempDir(), "a.parquet")
	rows := []columns{{[]said{{"user", "x", 2, nil}}, tools, []int64{1, 2}, true, 0.5}}
	must.Do(t, parquet.WriteFile(pq, rows))
	for _, c := range []struct {
		path string
		read func(string, func(*chat.Dict) error) error
	}{{writeFile(t, "a.arrow", buf.String()), arrowRows}, {pq, parquetRows}} {
		n := 0
		if err := c.read(c.path, func(o *chat.Dict) error {
			n++
			if got := shown(o); got != want {
				t.Errorf("%s:\n%s, want\n%s", filepath.Base(c.path), got, want)
			}
			return nil
		}); err != nil || n != 1 {
			t.Errorf("%s: %d rows, %v", c.path, n, err)
		}
	}
}

// shown returns a value as JSON.
func shown(v chat.Value) string {
	switch v := v.(type) {
	case *chat.Dict:
		var parts []string
		for _, key := range v.Keys {
			parts = append(parts, shown(key)+":"+shown(v.Data[key]))
		}
		return "{" + strings.Join(parts, ",") + "}"
	case []chat.Value:
		var parts []string
		for _, x := range v {
			parts = append(parts, shown(x))
		}
		return "[" + strings.Join(parts, ",") + "]"
	}
	raw, _ := json.Marshal(v)
	return string(raw)
}
