package data

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/text/chat"
	"github.com/cprun/cprun/internal/text/tokenizer"
)

// Formats of records.
const (
	FormatText       = "text"
	FormatTokens     = "tokens"
	FormatMessages   = "messages"
	FormatCompletion = "completion"
)

// Chat selects how conversations become tokens and targets.
type Chat struct {
	All   bool     // every token is a target, not only those of the assistant
	files []string // that decide the tokens; some may be absent
	read  func() (*templates, error)
}

// templates renders conversations.
type templates struct {
	plain, tools *chat.Template // tools: of conversations with tools; nil: plain
	forms        map[*chat.Template]*Form
	path         string    // of the templates, for messages
	tokens       chat.Vars // special tokens, such as bos_token
}

// NewChat names the chat template beside a tokenizer.json, or a file of Jinja in its place if template is not "". The
// first conversation reads it, since other records need none. all makes every token a target.
func NewChat(tokenizer, template string, all bool) *Chat {
	dir := filepath.Dir(tokenizer)
	var paths []string
	for _, name := range []string{"special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja"} {
		paths = append(paths, filepath.Join(dir, name))
	}
	return &Chat{all, append(paths, template), sync.OnceValues(func() (*templates, error) {
		found, err := chat.ReadSource(dir)
		if err != nil {
			return nil, err
		}
		if template != "" {
			raw, err := files.Read(template, chat.MaxTemplate)
			if err != nil {
				return nil, fmt.Errorf("data.chat_template: %w", err)
			}
			found.Templates = map[string]string{"default": string(raw)}
			found.Paths = map[string]string{"default": template}
		}
		t := &templates{tokens: chat.Vars{}, path: found.Paths["default"]}
		for name, text := range found.Tokens {
			t.tokens[name] = text
		}
		for name, to := range map[string]**chat.Template{"default": &t.plain, "tool_use": &t.tools} {
			if source, ok := found.Templates[name]; ok {
				if *to, err = chat.Compile(source); err != nil {
					return nil, fmt.Errorf("%s: %w", found.Paths[name], err)
				}
			}
		}
		if t.plain == nil {
			return nil, fmt.Errorf("%s has no default chat_template; name one by data.chat_template",
				filepath.Dir(tokenizer))
		}
		t.forms = map[*chat.Template]*Form{t.plain: FormOf(t.plain, t.tokens), t.tools: FormOf(t.tools, t.tokens)}
		return t, nil
	})}
}

const (
	keyMessages      = "messages"
	keyConversations = "conversations" // ShareGPT
	keyPrompt        = "prompt"
	keyCompletion    = "completion"
	keyTools         = "tools"
	keyKwargs        = "chat_template_kwargs"
	keyDocuments     = "documents"
	keySystem        = "system"
	keyFunctions     = "functions"
)

// formatOf returns the format of a record by its keys, unless it is given.
func formatOf(keys map[string]json.RawMessage, given string) (string, error) {
	if given != "" {
		return given, nil
	}
	var found, formats []string
	for _, f := range [][2]string{{keyText, FormatText}, {keyIDs, FormatTokens}, {keyMessages, FormatMessages},
		{keyConversations, FormatMessages}, {keyCompletion, FormatCompletion}} {
		if keys[f[0]] != nil && (f[0] != keyCompletion || keys[keyPrompt] != nil) {
			found, formats = append(found, strconv.Quote(f[0])), append(formats, f[1])
		}
	}
	switch {
	case len(found) == 1:
		return formats[0], nil
	case len(found) == 0 && keys["instruction"] != nil && keys["output"] != nil:
		return "", fmt.Errorf("%q and %q are not read; rename them to %q and %q", "instruction", "output", keyPrompt,
			keyCompletion)
	case len(found) == 0:
		return "", fmt.Errorf("no key %q, %q, %q, or %q with %q", keyText, keyIDs, keyMessages, keyPrompt, keyCompletion)
	}
	return "", fmt.Errorf("both %s; leave one out, or choose by data.format", strings.Join(found, " and "))
}

// chatEncoder encodes conversations. It is for one goroutine.
type chatEncoder struct {
	*Chat
	*templates // nil until one has messages
	tok        *tokenizer.Encoder
	ends       []string // special tokens
	notes      *Keys
}

func (e *Encoding) newChatEncoder() (*chatEncoder, error) {
	if e.Chat == nil {
		return nil, errors.New("a conversation cannot be written as tokens alone, without its targets; train on the records")
	}
	if e.Tokenizer == nil || e.Tokenizer.path == "" || e.Tokenizer.bytes() {
		return nil, errors.New("conversations need the tokenizer of a model; name one by data.tokenizer")
	}
	t, err := e.Tokenizer.read()
	if err != nil {
		return nil, err
	}
	return &chatEncoder{e.Chat, nil, t.NewEncoder(), t.Specials(), e.Notes}, nil
}

// document renders and encodes a conversation. Its labels are never nil.
func (e *chatEncoder) document(c *conversation, eos int) (d Document, err error) {
	if c.messages == nil {
		return e.texts(c, eos)
	}
	if e.templates == nil {
		if e.templates, err = e.read(); err != nil {
			return d, err
		}
	}
	trace, err := e.render(c, len(c.messages), false)
	if err != nil {
		return d, fmt.Errorf("%s: %w", e.path, err)
	}
	whole, spans := trace.Text, trace.Spans
	switch {
	case e.All:
		spans = []chat.Span{{From: 0, To: len(whole)}}
	case c.split >= 0:
		return e.completed(c, trace)
	case !e.template(c).Spans:
		if spans, err = e.answers(c, trace); err != nil {
			return d, err
		}
	}
	if spans, err = e.withoutFlagged(c, trace, spans); err != nil {
		return d, err
	}
	if d, err = e.labelled(whole, spans); err != nil {
		return d, err
	}
	if len(spans) > 0 && !e.All && !slices.ContainsFunc(e.ends, func(end string) bool {
		return slices.ContainsFunc(spans, func(s chat.Span) bool { return strings.Contains(whole[s.From:s.To], end) })
	}) {
		e.notes.Add(fmt.Sprintf("no target of some conversations is a special token, so the model does not learn where its "+
			"turn ends; put that token into {%% generation %%} of %s", e.path))
	}
	return d, nil
}

// labelled encodes a text. Tokens with a character in one of the spans are targets.
func (e *chatEncoder) labelled(text string, spans []chat.Span) (d Document, err error) {
	marks := make([]tokenizer.Mark, 0, 2*len(spans))
	for _, s := range spans {
		marks = append(marks, tokenizer.Mark{At: s.From}, tokenizer.Mark{At: s.To})
	}
	if d.IDs, err = e.tok.AppendMarked(nil, text, marks); err != nil {
		return d, err
	}
	d.Labels = slices.Repeat([]int32{Ignore}, len(d.IDs))
	for i, s := range spans {
		if from, to := marks[2*i].Before, marks[2*i+1].After; s.From < s.To {
			copy(d.Labels[from:to], d.IDs[from:to])
		}
	}
	return d, nil
}

// template returns the template of a conversation.
func (e *chatEncoder) template(c *conversation) *chat.Template {
	if e.templates.tools != nil && c.vars[keyTools] != nil {
		return e.templates.tools
	}
	return e.plain
}

// vars returns the variables of a rendering of the first n messages.
func (e *chatEncoder) vars(c *conversation, n int, prompt bool) chat.Vars {
	vars := make(chat.Vars, len(e.tokens)+len(c.vars)+2)
	maps.Copy(vars, e.tokens)
	maps.Copy(vars, c.vars)
	vars[keyMessages] = c.messages[:n]
	vars[promptKey] = prompt
	return vars
}

// render renders the first n messages.
func (e *chatEncoder) render(c *conversation, n int, prompt bool) (*chat.Trace, error) {
	return e.template(c).Trace(e.vars(c, n, prompt))
}

// FormNote begins the note that a training form finds the answers.
const FormNote = "training form "

// answers finds the assistant's turns of a template without {% generation %}: by its training form, else by rendering
// the messages before and up to each turn.
func (e *chatEncoder) answers(c *conversation, whole *chat.Trace) (spans []chat.Span, err error) {
	if f := e.forms[e.template(c)]; f != nil {
		if spans = f.Answers(e.vars(c, len(c.messages), false), whole.Text); spans != nil {
			e.notes.Add(fmt.Sprintf("%s%s marks the answers, since %s has no {%% generation %%}; a template with it, named by "+
				"data.chat_template, overrides", FormNote, f.Name, e.path))
			return spans, nil
		}
	}
	var marked *markedTrace
	for i, m := range c.messages {
		if !isAnswer(m) {
			continue
		}
		from, to, err := prefixTurn(whole, i)
		if err != nil {
			if marked == nil {
				marked = e.mark(c, whole.Text)
			}
			var ok bool
			if from, to, ok = marked.turn(i, e.ends); !ok {
				return nil, fmt.Errorf("turn %d: %w, so %s does not show which tokens the assistant writes; mark them by "+
					"{%% generation %%} in a copy, and name it by data.chat_template", i+1, err, e.path)
			}
		}
		spans = append(spans, chat.Span{From: from, To: from + e.turnEnd(m.(*chat.Dict), whole.Text[from:to])})
	}
	return spans, nil
}

// assistants lists the roles that the model writes.
var assistants = []string{"assistant", "model"}

// turnEnd returns the end of the content and of the special token after it, in the text of a turn.
func (e *chatEncoder) turnEnd(m *chat.Dict, turn string) int {
	at := 0
	content, ok := m.Data["content"].(string)
	if ok && !m.Has("tool_calls") {
		text, plain := strings.TrimSpace(content), turn
		for _, special := range e.ends { // "end" is also in <|im_end|>
			if strings.Contains(special, text) {
				plain = strings.ReplaceAll(plain, special, strings.Repeat("\x00", len(special)))
			}
		}
		if k := strings.LastIndex(plain, text); k >= 0 {
			at = k + len(text)
		}
	}
	first, last := len(turn)+1, 0
	for _, special := range e.ends {
		if k := strings.Index(turn[at:], special); k >= 0 {
			first = min(first, at+k+len(special))
		}
		if k := strings.LastIndex(turn, special); k >= 0 {
			last = max(last, k+len(special))
		}
	}
	switch {
	case at > 0 && first <= len(turn):
		return first
	case last > 0 && strings.TrimSpace(turn[last:]) == "":
		return last
	}
	return len(turn)
}

// messagesBegin matches the beginning of a list of messages, or of a record, as JSON. Text may begin with "[INST]".
var messagesBegin = regexp.MustCompile(`^(\[\s*\{|\{\s*")`)

// Prompt returns the ids of a conversation up to the assistant's answer, and the token that ends an answer; -1 if the
// template has none. The text is one message of the user, a list of messages as JSON, or a record with them.
func (c *Chat) Prompt(t *Tokenizer, text string) (ids []int32, end int, err error) {
	e, err := (&Encoding{Tokenizer: t, Chat: c}).newChatEncoder()
	if err == nil {
		e.templates, err = e.read()
	}
	if err != nil {
		return nil, -1, err
	}
	keys := map[string]json.RawMessage{}
	trimmed := strings.TrimSpace(text)
	switch begins := messagesBegin.FindString(trimmed); {
	case strings.HasPrefix(begins, "["):
		keys[keyMessages] = json.RawMessage(trimmed)
	case begins != "":
		if keys, _, err = fields([]byte(trimmed), FormatMessages, nil); err != nil {
			return nil, -1, err
		}
	default:
		keys[keyMessages] = fmt.Appendf(nil, `[{"role":"user","content":%s}]`, appendString(nil, text))
	}
	talk, err := parseConversation(keys, FormatMessages)
	if err != nil {
		return nil, -1, err
	}
	prompt, err := e.render(talk, len(talk.messages), true)
	if err != nil {
		return nil, -1, fmt.Errorf("%s: %w", e.path, err)
	}
	ids, err = e.tok.AppendMarked(nil, prompt.Text, nil)
	return ids, e.endToken(talk, t), err
}

// endToken returns the special token after an answer; -1: none.
func (e *chatEncoder) endToken(talk *conversation, t *Tokenizer) int {
	const answer = "(the answer)"
	m := chat.NewDict()
	m.Set("role", "assistant")
	m.Set("content", answer)
	talk.messages = append(talk.messages, m)
	trace, err := e.render(talk, len(talk.messages), false)
	whole := trace.Text
	at := strings.LastIndex(whole, answer)
	tok, unread := t.read()
	if err != nil || at < 0 || unread != nil {
		return -1
	}
	turn := whole[at : at+e.turnEnd(m, whole[at:])]
	for _, special := range e.ends {
		if id, ok := tok.ID(special); ok && strings.HasSuffix(turn, special) {
			return id
		}
	}
	return -1
}

// completed marks the tokens after those of the rendered prompt, like TRL.
func (e *chatEncoder) completed(c *conversation, whole *chat.Trace) (d Document, err error) {
	prompt, err := e.render(c, c.split, true)
	if err != nil {
		return d, fmt.Errorf("%s: the prompt: %w", e.path, err)
	}
	spans, err := e.withoutFlagged(c, whole, []chat.Span{{From: 0, To: len(whole.Text)}})
	if err != nil {
		return d, err
	}
	ids, err := e.tok.AppendMarked(nil, prompt.Text, nil)
	if err == nil {
		d, err = e.labelled(whole.Text, spans)
	}
	for i := 0; i < min(len(d.IDs), len(ids)) && d.IDs[i] == ids[i]; i++ {
		d.Labels[i] = Ignore
	}
	return d, err
}

// texts encodes a prompt and completion of text. EOS ends the completion; one of the prompt does not count.
func (e *chatEncoder) texts(c *conversation, eos int) (d Document, err error) {
	prompt, err := e.tok.Append(nil, c.prompt)
	if err == nil {
		d.IDs, err = e.tok.Append(nil, c.prompt+c.completion)
	}
	if n := len(d.IDs); err == nil && eos >= 0 && (n == 0 || c.completion == "" || int(d.IDs[n-1]) != eos) {
		d.IDs = append(d.IDs, int32(eos))
	}
	if d.Labels = after(d.IDs, prompt); e.All {
		d.Labels = slices.Clone(d.IDs)
	}
	return d, err
}

// after returns the labels of ids that begin where they differ from the prompt.
func after(ids, prompt []int32) []int32 {
	labels := slices.Clone(ids)
	for i := 0; i < min(len(ids), len(prompt)) && ids[i] == prompt[i]; i++ {
		labels[i] = Ignore
	}
	return labels
}
