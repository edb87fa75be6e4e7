package data

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/text/chat"
)

// A conversation is a record of messages or of a prompt and completion.
type conversation struct {
	vars               chat.Vars
	messages           []chat.Value
	prompt, completion string // as text
	split              int    // messages of the prompt; -1: none
	flags              []turnFlag
	unnamed            map[string]bool // keys of messages that no rule names
}

// A turnFlag states whether a message is a target.
type turnFlag struct {
	at  int // of the messages
	key string
	on  bool
}

// parseConversation reads the keys of a record.
func parseConversation(keys map[string]json.RawMessage, format string) (c *conversation, err error) {
	c = &conversation{split: -1, vars: chat.Vars{keyTools: nil, keyDocuments: nil}, unnamed: map[string]bool{}}
	if format == FormatCompletion {
		if err = c.parts(keys); err != nil {
			return c, err
		}
	} else if err = c.turns(keys); err != nil {
		return c, err
	}
	for _, key := range []string{keyTools, keyFunctions, keyDocuments, keyKwargs} {
		if keys[key] == nil || string(keys[key]) == `""` {
			continue
		}
		if c.messages == nil {
			return nil, fmt.Errorf("%q reaches no template, since prompt and completion are texts; write lists of turns", key)
		}
		if key == keyFunctions && (keys[keyConversations] == nil || keys[keyTools] != nil) {
			return nil, errors.New(`"functions" names the tools in ShareGPT's conversations only; name them "tools", once`)
		}
		if err := c.variable(key, keys[key]); err != nil {
			return nil, fmt.Errorf("%q: %w", key, err)
		}
	}
	return c, nil
}

// variable reads a variable of the template.
func (c *conversation) variable(key string, raw []byte) error {
	v, err := chat.Decode(raw)
	if text, ok := v.(string); ok { // as datasets holds tools of several shapes
		v, err = chat.Decode(finite([]byte(text)))
	}
	if err != nil {
		return err
	}
	kwargs, isMap := v.(*chat.Dict)
	if key == keyKwargs && isMap {
		maps.Copy(c.vars, kwargs.Data)
		return nil
	}
	if _, list := v.([]chat.Value); key == keyKwargs || !list && v != nil {
		return errors.New("want a list, or for chat_template_kwargs a map")
	}
	if key == keyFunctions {
		key = keyTools
	}
	c.vars[key] = v
	return nil
}

// parts reads prompt and completion, both as text or both as messages.
func (c *conversation) parts(keys map[string]json.RawMessage) error {
	a, b := json.Unmarshal(keys[keyPrompt], &c.prompt), json.Unmarshal(keys[keyCompletion], &c.completion)
	if a == nil && b == nil {
		return nil
	}
	if a == nil || b == nil {
		return fmt.Errorf("%q and %q are both texts or both lists of messages", keyPrompt, keyCompletion)
	}
	if err := c.add(keys, keyPrompt); err != nil {
		return err
	}
	c.split = len(c.messages)
	return c.add(keys, keyCompletion)
}

// turns reads messages, or ShareGPT's conversations, with the system message beside them.
func (c *conversation) turns(keys map[string]json.RawMessage) error {
	key := keyMessages
	if keys[keyConversations] != nil {
		key = keyConversations
	}
	var system string
	if raw := keys[keySystem]; raw != nil {
		if err := json.Unmarshal(raw, &system); err != nil {
			return fmt.Errorf("the value of %q is not a string", keySystem)
		}
	}
	if system == "" {
		return c.add(keys, key)
	}
	first := chat.NewDict()
	first.Set("role", "system")
	first.Set("content", system)
	c.messages = []chat.Value{first}
	if err := c.add(keys, key); err != nil {
		return err
	}
	if second := c.messages[1].(*chat.Dict); second.Data["role"] == "system" {
		if second.Data["content"] != system {
			return fmt.Errorf("%q and %s[0] are different turns of the system; leave one out", keySystem, key)
		}
		c.messages = c.messages[1:]
		for i := range c.flags {
			c.flags[i].at--
		}
	}
	return nil
}

// shareGPT maps roles of ShareGPT.
var shareGPT = map[string]string{"human": "user", "gpt": "assistant", "function_call": "assistant",
	"observation": "tool"}

// reasoningKeys lists the names of one key. Templates differ in it.
var reasoningKeys = []string{"reasoning_content", "thinking", "reasoning"}

// add appends a list of messages. Keys of ShareGPT get the names of the others, and reasoning its other name, as in
// transformers.
func (c *conversation) add(keys map[string]json.RawMessage, key string) error {
	if keys[key] == nil {
		return fmt.Errorf("no key %q", key)
	}
	v, err := chat.Decode(keys[key])
	if err != nil {
		return fmt.Errorf("%q: %w", key, err)
	}
	list, _ := v.([]chat.Value)
	if len(list) == 0 {
		return fmt.Errorf("%q is not a list of messages, or is empty", key)
	}
	for i, m := range list {
		d, ok := m.(*chat.Dict)
		if !ok {
			return fmt.Errorf("%s[%d] is not a map with role and content", key, i)
		}
		_, from := d.Data["from"].(string)
		rename(d, "from", "role")
		rename(d, "value", "content")
		role, ok := d.Data["role"].(string)
		if !ok {
			return fmt.Errorf("%s[%d] has no role", key, i)
		}
		if name := shareGPT[role]; name != "" && (from || key == keyConversations) {
			d.Set("role", name)
		}
		if err := c.check(d); err != nil {
			return fmt.Errorf("%s[%d]: %w", key, i, err)
		}
		for _, name := range reasoningKeys {
			if v := d.Data[name]; v != nil {
				d.Set("reasoning_content", v)
				if !d.Has("thinking") {
					d.Set("thinking", v)
				}
				break
			}
		}
		c.messages = append(c.messages, d)
	}
	return nil
}

// check reads the flags of the next message, and refuses keys and parts of it.
func (c *conversation) check(d *chat.Dict) error {
	for _, key := range d.Keys {
		value := d.Data[key]
		list, isList := value.([]chat.Value)
		if value == nil || value == "" || isList && len(list) == 0 {
			continue
		}
		unnamed, err := checkKey(key, kindTurn, nil, false)
		if err != nil {
			return err
		}
		if unnamed {
			c.unnamed[key] = true
		}
		if !slices.Contains(flagKeys, key) {
			continue
		}
		on, err := flag(fmt.Append(nil, value))
		if _, text := value.(string); text || err != nil {
			return fmt.Errorf("%s is %s; want 0 or 1, false or true", key, shown(fmt.Sprint(value)))
		}
		if n := len(c.flags); n > 0 && c.flags[n-1].at == len(c.messages) && c.flags[n-1].on != on {
			return fmt.Errorf("%s and %s disagree; leave one out", c.flags[n-1].key, key)
		}
		c.flags = append(c.flags, turnFlag{len(c.messages), key, on})
	}
	parts, _ := d.Data["content"].([]chat.Value)
	for _, p := range parts {
		if part, ok := p.(*chat.Dict); ok {
			kind, _ := part.Data["type"].(string)
			if slices.Contains(strings.Fields(media), kind) {
				return fmt.Errorf("content of type %q: %s", kind, ruleOf("images", kindTurn).note)
			}
		}
	}
	return nil
}

func rename(d *chat.Dict, from, to string) {
	if !d.Has(from) || d.Has(to) {
		return
	}
	d.Keys[slices.Index(d.Keys, from)] = to
	d.Data[to] = d.Data[from]
	delete(d.Data, from)
}

// withoutFlagged removes the turns from the spans of targets that a flag excludes, and refuses flags that would include
// others.
func (e *chatEncoder) withoutFlagged(c *conversation, whole *chat.Trace, spans []chat.Span) ([]chat.Span, error) {
	for _, f := range c.flags {
		role := c.messages[f.at].(*chat.Dict).Data["role"].(string)
		if target := e.All || f.at >= c.split && c.split >= 0 || c.split < 0 && isAnswer(c.messages[f.at]); f.on {
			if !target {
				return nil, fmt.Errorf("turn %d, of the role %s, has %s, and is no target by its place; remove the key, "+
					"or set data.train_on: all and flag the other turns", f.at+1, role, f.key)
			}
			continue
		} else if !target {
			continue
		}
		if marked := !e.All && c.split < 0 && e.template(c).Spans; marked {
			kept := []chat.Span{}
			for i, owner := range whole.Owners {
				if owner < 0 {
					return nil, fmt.Errorf("turn %d has %s, and {%% generation %%} of %s is outside of a loop over the messages; "+
						"leave the turn out, or use another data.chat_template", f.at+1, f.key, e.path)
				}
				if slices.Contains(spans, whole.Spans[i]) && owner != f.at {
					kept = append(kept, whole.Spans[i])
				}
			}
			spans = kept
			continue
		}
		if !e.All && c.split < 0 { // each answer has a span
			n := len(slices.DeleteFunc(slices.Clone(c.messages[:f.at]), func(m chat.Value) bool { return !isAnswer(m) }))
			spans = slices.Clone(spans)
			spans[n] = chat.Span{}
			continue
		}
		from, to, err := e.rangeOf(whole, f.at)
		if err != nil {
			return nil, fmt.Errorf("turn %d has %s: %w, so %s does not show which tokens to leave out; use another "+
				"data.chat_template", f.at+1, f.key, err, e.path)
		}
		spans = subtract(spans, from, to)
	}
	return spans, nil
}

// rangeOf returns the text of a message, with what the template puts around it.
func (e *chatEncoder) rangeOf(whole *chat.Trace, at int) (from, to int, err error) {
	for n, end := range map[int]*int{at: &from, at + 1: &to} {
		if n == 0 {
			continue // the text begins with what the template puts first
		}
		same, rest, err := whole.Prefix(n, false)
		if err == nil && !strings.HasPrefix(whole.Text[same:], rest) {
			err = errors.New("the messages up to it do not render as the start of the whole conversation")
		}
		if err != nil {
			return 0, 0, err
		}
		*end = same + len(rest)
	}
	return from, to, nil
}

// subtract returns the spans without [from, to).
func subtract(spans []chat.Span, from, to int) (left []chat.Span) {
	for _, s := range spans {
		for _, part := range []chat.Span{{From: s.From, To: min(s.To, from)}, {From: max(s.From, to), To: s.To}} {
			if part.From < part.To {
				left = append(left, part)
			}
		}
	}
	return left
}
