package verify

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/text/chat"
	"github.com/cprun/cprun/internal/text/data"
)

var templatesDir = flag.String("templates", "../../text/chat/testdata", "a directory of chat templates (*.jinja)")

const chatDir = "../../text/data/testdata/chat/"

// ends lists turns with several special tokens, or none, after the content.
var ends = []string{"{{ m.content }}<|im_end|>\n<s>", "{{ m.content[:30] }}<s><|im_end|> \n",
	"{{ m.content }}<s><|im_end|>", "<|im_start|>{{ m.content }}x<|im_end|>y", "{{ m.content }} the end",
	"<s>{{ m.content[:30] }}.", "{{ m.content | upper }}{{ m.tool_calls | tojson }}<s><|im_end|>",
	"{{ m.content | trim }}<s><|im_end|>", "{{ m.content }}<s>{{ m.content }}<|im_end|>",
	"{% if m.content | length > 3 %}<s>{% endif %}{{ m.content }}<|im_end|>\n",
	"{{ m.content }}{% if m.train %}{% generation %}x{% endgeneration %}{% endif %}<|im_end|>",
	"us{% generation %}{% endgeneration %}er assis{% generation %}{% endgeneration %}tant{{ m.content }}"}

// others lists templates that render the messages up to a turn differently, and those with a training form.
func others() (sources []string) {
	const turns = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>\n" +
		"{% endfor %}"
	prompt := "{{ '<|im_start|>assistant:' if add_generation_prompt "
	sources = append(sources, turns+prompt+"else '\n<s>' }}", "{{ messages | length }}"+turns+prompt+"}}",
		"{% for m in messages %}{% if m.role == 'user' %}[{{ messages[0].content if loop.last }}{{ m.content }}]{% else %} "+
			"{{ m.content }}<s>{% endif %}{% endfor %}",
		"{% for m in messages %}<|im_start|>{{ m.role }}:{{ '(thought)' if loop.last }}{{ m.content }}<|im_end|>{% endfor %}"+
			prompt+"}}")
	for _, f := range data.Forms() {
		header := regexp.MustCompile(`<[\w|]+>(model|assistant\|>|assistant)`).FindString(f.Source)
		tags := regexp.MustCompile(`\{%- (end)?generation -%\}`)
		sources = append(sources, "A captain.\n"+tags.ReplaceAllString(f.Source, "")+
			"{{ '"+header+"\n' if add_generation_prompt }}")
	}
	return sources
}

// records returns the conversations of package chat, and more.
func records(t *testing.T) (lines []string) {
	t.Helper()
	var file struct {
		Cases map[string]map[string]json.RawMessage
	}
	raw, err := os.ReadFile("../../text/chat/testdata/renders.json")
	if err == nil {
		err = json.Unmarshal(raw, &file)
	}
	for _, c := range file.Cases {
		record := map[string]json.RawMessage{"messages": c["messages"], "tools": c["tools"]}
		delete(c, "messages")
		delete(c, "tools")
		kwargs, _ := json.Marshal(c)
		record["chat_template_kwargs"] = kwargs
		line, _ := json.Marshal(record)
		lines = append(lines, string(line))
	}
	for _, answer := range []string{"d", "!?", "a <|im_end|> b", "<s>x", "[", "q<|im_end|>", strings.Repeat("long ", 20)} {
		lines = append(lines, fmt.Sprintf(`{"messages": [{"role": "user", "content": %q}, {"role": "assistant", `+
			`"content": %[1]q}, {"role": "user", "content": %[1]q}, {"role": "model", "content": %[1]q}]}`, answer))
	}
	if err != nil || len(lines) < 30 {
		t.Fatal(len(lines), err)
	}
	return lines
}

// A reading encodes conversations by the loader.
type reading struct {
	cfg *config.Config
	enc data.Encoding
}

func newReading(tokenizer, template, on string) reading {
	d := config.Data{Tokenizer: tokenizer, ChatTemplate: template, Format: "auto", EOSTokenID: -1, TrainOn: on}
	return reading{&config.Config{Data: d}, data.Encoding{Tokenizer: data.NewTokenizer(d.Tokenizer, 0), EOS: -1,
		Chat: data.NewChat(d.Tokenizer, template, on == "all")}}
}

// batch returns the loader's rows of the records of a file, each in its own sample.
func (r reading) batch(t *testing.T, path string) (batch [][]Row, err error) {
	r.cfg.Data.Path = config.Files{{Path: path}}
	err = r.enc.Each(t.Context(), []string{path}, func(_ int, doc data.Document) error {
		var rows []Row
		for i, id := range doc.IDs {
			rows = append(rows, Row{ID: id, Target: -1, Position: int32(i)})
			if i > 0 && (doc.Labels == nil || doc.Labels[i] != data.Ignore) {
				rows[i-1].Target = id
			}
		}
		batch = append(batch, rows)
		return nil
	})
	return batch, err
}

// wrong returns the first sample that differs from its record; -1: none.
func (r reading) wrong(t *testing.T, batch [][]Row) int {
	t.Helper()
	var samples []int64
	for i := range batch {
		samples = append(samples, int64(i))
	}
	got := must.Have(wholeRecords(r.cfg, 1<<20, samples, batch))
	return slices.IndexFunc(samples, func(s int64) bool { return !slices.Equal(got[s], batch[s]) })
}

// marked writes a tokenizer in which the special tokens of a template are special tokens.
func marked(t *testing.T, template string) string {
	t.Helper()
	var file map[string]any
	raw, err := os.ReadFile(chatDir + "tokenizer.json")
	if err == nil {
		err = json.Unmarshal(raw, &file)
	}
	source, err2 := os.ReadFile(template)
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	added := file["added_tokens"].([]any)
	for _, token := range specials.FindAllString(string(source), -1) {
		if !slices.ContainsFunc(added, func(a any) bool { return a.(map[string]any)["content"] == token }) {
			added = append(added, map[string]any{"id": 417 + len(added), "content": token, "special": true, "normalized": false,
				"single_word": false, "lstrip": false, "rstrip": false})
		}
	}
	file["added_tokens"] = added
	if raw, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	return writeFile(t, "tokenizer.json", string(raw))
}

var clock = regexp.MustCompile(`strftime_now\([^)]*\)`)

var specials = regexp.MustCompile(`<\|[\w ]+\|>|<｜[^｜]*｜>|</?[a-z_]+>|\[/?[A-Z_]+\]`)

// The second search finds the loader's targets with every template that the loader takes.
func TestTurnsEqualTheLoader(t *testing.T) {
	t.Parallel()
	templates, err := filepath.Glob(filepath.Join(*templatesDir, "*.jinja"))
	if err != nil || len(templates) == 0 {
		t.Fatal(templates, err)
	}
	for i, path := range templates { // a template asks for the time more than once, perhaps in two minutes
		source := must.Have(os.ReadFile(path))
		templates[i] = writeFile(t, filepath.Base(path), clock.ReplaceAllString(string(source), "'now'"))
	}
	for i, turn := range ends {
		templates = append(templates, writeFile(t, fmt.Sprint(i, ".jinja"), "{% for m in messages %}{{ '[' }}"+
			"{%- if m.role in ['assistant', 'model'] %}"+turn+"{% else %}{{ m.content }}]{% endif %}{% endfor %}"+
			"{% if add_generation_prompt %}{{ '[' }}{% endif %}"))
	}
	for i, source := range others() {
		templates = append(templates, writeFile(t, fmt.Sprint("other", i, ".jinja"), source))
	}
	lines, compared := records(t), 0
	for _, template := range templates {
		r, accepted, batch := newReading(marked(t, template), template, "assistant"), "", [][]Row(nil)
		for _, line := range lines {
			if rows, err := r.batch(t, writeFile(t, "a.jsonl", line)); err == nil {
				accepted, batch = accepted+line+"\n", append(batch, rows...)
			}
		}
		r.cfg.Data.Path = config.Files{{Path: writeFile(t, "a.jsonl", accepted)}}
		compared += len(batch)
		if s := r.wrong(t, batch); s >= 0 {
			t.Errorf("%s: the loader has other targets:\n%v\n%s", template, batch[s], strings.Split(accepted, "\n")[s])
		}
	}
	if t.Logf("%d templates, %d conversations", len(templates), compared); compared < 10*len(templates) {
		t.Error("most conversations are refused")
	}
}

// So do all formats, completions of messages, and train_on all.
func TestConversationsEqualTheLoader(t *testing.T) {
	t.Parallel()
	for _, name := range strings.Fields("messages.jsonl tools.jsonl tools.arrow prompts.parquet texts.jsonl " +
		"share.jsonl shapes.parquet") {
		for _, on := range []string{"assistant", "all"} {
			r := newReading(chatDir+"tokenizer.json", "", on)
			batch, err := r.batch(t, chatDir+name)
			if s := r.wrong(t, batch); err != nil || len(batch) == 0 || s >= 0 {
				t.Errorf("%s, train_on %s: record %d of %d, %v", name, on, s+1, len(batch), err)
			}
		}
	}
}

// Texts, tokens and conversations may be in one file, and a template may be for tools alone.
func TestRecordsOfSeveralKinds(t *testing.T) {
	talk := `{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]`
	files := map[string]string{
		"tokenizer_config.json": `{"chat_template": [{"name": "default", "template": ` +
			`"{% for m in messages %}{{ m.content }};{% endfor %}"}, {"name": "tool_use", "template": ` +
			`"{{ tools }}{% for m in messages %}{{ m.content }}.{% endfor %}"}]}`,
		"chat_template.jinja": "{% for m in messages %}{{ m.content }}<|im_end|>{% generation %}{{ m.role }}" +
			"{% endgeneration %}{% endfor %}{{ bos_token }}",
		"special_tokens_map.json": `{"bos_token": "<s>"}`,
		"a.jsonl": `{"text": "a text"}` + "\n" + talk + "}\n" + `{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}` + "\n" +
			talk + `, "tools": [1]}` + "\n" + `{"prompt": "a ", "completion": "b"}` + "\n",
	}
	for range 2 {
		dir := t.TempDir()
		raw := must.Have(os.ReadFile(chatDir + "tokenizer.json"))
		files["tokenizer.json"] = string(raw)
		for name, text := range files {
			must.Do(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
		}
		r := newReading(filepath.Join(dir, "tokenizer.json"), "", "assistant")
		batch, err := r.batch(t, filepath.Join(dir, "a.jsonl"))
		if s := r.wrong(t, batch); err != nil || len(batch) != 5 || s >= 0 {
			t.Errorf("record %d of %d: %v\n%v", s+1, len(batch), err, batch)
		}
		delete(files, "chat_template.jinja")
	}
}

// If both keys are present, data.format decides.
func TestFormatsOfRecords(t *testing.T) {
	talk := `[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]`
	path := writeFile(t, "a.jsonl", `{"messages": `+talk+`, "prompt": `+talk+`, "completion": `+talk+`}`)
	for _, format := range []string{data.FormatMessages, data.FormatCompletion} {
		r := newReading(chatDir+"tokenizer.json", "", "assistant")
		r.cfg.Data.Format, r.enc.Format = format, format
		batch, err := r.batch(t, path)
		if s := r.wrong(t, batch); err != nil || len(batch) != 1 || s >= 0 {
			t.Errorf("%s: %d records, %v", format, len(batch), err)
		}
	}
}

// If the messages up to an answer do not begin the whole conversation, it has no targets. The loader refuses it.
func TestAnswersThatAreNoPrefix(t *testing.T) {
	talk := writeFile(t, "a.jsonl", `{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", `+
		`"content": "b b b b"}, {"role": "user", "content": "c"}]}`)
	for _, template := range []string{"{{ messages | length }}{{ messages[-1].content }}",
		"{% for m in messages %}{{ m.content | length }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}:" +
			"{{ m.content }}<|im_end|>{% endfor %}{{ '<|im_start|>assistant:' if add_generation_prompt else '<s>' }}",
		"{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}xxx{% endif %}",
		"{% for m in messages %}{{ m.content }}{% endfor %}{% if not add_generation_prompt %}!{% endif %}"} {
		r := newReading(chatDir+"tokenizer.json", writeFile(t, "t.jinja", template), "all")
		batch, err := r.batch(t, talk)
		if err != nil || len(batch) != 1 {
			t.Fatal(len(batch), err)
		}
		for i := range batch[0] {
			batch[0][i].Target = -1
		}
		r.cfg.Data.TrainOn = "assistant"
		if s := r.wrong(t, batch); s >= 0 {
			t.Errorf("%s: record %d has targets", template, s+1)
		}
	}
}

// A conversation that a training form renders otherwise has the answers that were found without it.
func TestAnswersWithoutTheForm(t *testing.T) {
	path := writeFile(t, "t.jinja", "{% if less %}{% for m in messages %}{{ m.content }}<s>{% endfor %}{% else %}"+
		others()[4]+"{{ more if not add_generation_prompt }}{% endif %}")
	lines := `{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b b"}], ` +
		`"chat_template_kwargs": {"more": "<s>"}}`
	lines += "\n" + strings.Replace(lines, "more", "less", 1) + "\n" + `{"messages": [{"role": "user", "content": "a"}, ` +
		`{"role": "assistant", "content": "b"}, {"role": "model", "content": "dropped"}]}` + "\n"
	for _, line := range strings.SplitAfter(strings.TrimSpace(lines), "\n") {
		talk := writeFile(t, "a.jsonl", line)
		r := newReading(chatDir+"tokenizer.json", path, "assistant")
		batch, err := r.batch(t, talk)
		if err != nil { // the last one is refused: it is read, without a fault
			r = newReading(chatDir+"tokenizer.json", path, "all")
			batch, err = r.batch(t, talk)
			r.cfg.Data.TrainOn = "assistant"
		}
		if s := r.wrong(t, batch); err != nil || s >= 0 && strings.Contains(line, "kwargs") {
			t.Errorf("%s: other targets than the loader's, %v", line, err)
		}
	}
}

// Answers of a form that differ in other characters than white space and special tokens do not count.
func TestFormsAreChecked(t *testing.T) {
	form := writeFile(t, "t.jinja", others()[4])
	c := must.Have(newTalk(&newReading(chatDir+"tokenizer.json", form, "assistant").cfg.Data))
	user, answer := chat.NewDict(), chat.NewDict()
	for i, m := range []*chat.Dict{user, answer} {
		m.Set("role", []string{"user", "assistant"}[i])
		m.Set("content", "b")
	}
	c.name, c.vars, c.messages = "default", chat.Vars{}, []chat.Value{user, answer}
	whole, _, err := c.render(c.messages, false)
	from, to := strings.LastIndex(whole, "<think>"), len(whole)
	for found, same := range map[span]bool{{from, to}: false, {0, 0}: false, {from, to - 1}: false, {from + 3, to}: true,
		{from - 5, to}: true, {from, from + 2}: true} {
		got := c.formed(whole, []span{found})
		want := span{from, to}
		if same {
			want = found
		}
		if err != nil || got[0] != want {
			t.Errorf("found %v: %v, %v, want %v", found, got, err, want)
		}
	}
}

// A record that is too long for a sample has no place, even if a prefix of the sample is one of it.
func TestLongRecordsHaveNoPlace(t *testing.T) {
	path := writeFile(t, "a.jsonl", `{"input_ids": [1, 2, 3, 4, 5]}`+"\n"+
		`{"input_ids": [1, 2, 3, 9], "loss_mask": [1, 0, 0, 1]}`)
	r := newReading(chatDir+"tokenizer.json", "", "assistant")
	r.cfg.Data.Path, r.cfg.Data.SeqLen = config.Files{{Path: path}}, 3
	want := []Row{{1, -1, 0, 0}, {2, -1, 1, 0}, {3, 9, 2, 0}}
	if got, err := wholeRecords(r.cfg, 4, []int64{0}, [][]Row{want}); err != nil || !slices.Equal(got[0], want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
}

// Any other target is found.
func TestWrongTargetsOfConversations(t *testing.T) {
	t.Parallel()
	edits := map[string]func(rows []Row, first, last int){
		"a header trained":   func(rows []Row, first, _ int) { rows[first-1].Target = rows[first].ID },
		"a user trained":     func(rows []Row, _, _ int) { rows[1].Target = rows[2].ID },
		"a start left out":   func(rows []Row, first, _ int) { rows[first].Target = -1 },
		"an end left out":    func(rows []Row, _, last int) { rows[last].Target = -1 },
		"more after the end": func(rows []Row, _, last int) { rows[last+1].Target = rows[last+2].ID },
	}
	form := writeFile(t, "form.jinja", others()[4])
	for _, template := range []string{"", "../../text/chat/testdata/plain.jinja", form} {
		for _, name := range []string{"messages.jsonl", "tools.jsonl", "share.jsonl"} {
			for edit, change := range edits {
				r := newReading(chatDir+"tokenizer.json", template, "assistant")
				batch := must.Have(r.batch(t, chatDir+name))
				rows := batch[0]
				first := slices.IndexFunc(rows, func(r Row) bool { return r.Target >= 0 })
				last := first
				for rows[last+1].Target >= 0 {
					last++
				}
				rows = append(rows, Row{}, Row{})
				change(rows, first, last)
				batch[0] = rows[:len(rows)-2]
				if r.wrong(t, batch) != 0 {
					t.Errorf("%s, template %q: %s is not found", name, template, edit)
				}
			}
		}
	}
}
