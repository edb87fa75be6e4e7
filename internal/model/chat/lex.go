package chat

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A segment is a text, an expression ({{) or a statement ({%) of a template. White space around tags is removed by the
// rules of Jinja2 with trim_blocks and lstrip_blocks.
type segment struct {
	kind byte // 't', '{' or '%'
	text string
	toks []tok
	line int
}

// A tok is a name, number, string or operator of a tag.
type tok struct {
	kind byte // 'n', '0', 's' or 'o'
	text string
}

func (t tok) is(op string) bool { return t.kind != 's' && t.text == op }

// maxTokens bounds the tokens of a tag, and maxTemplate the bytes of a template: the engine recurses over both.
const (
	maxTokens   = 2000
	maxTemplate = 1 << 20
)

type lexer struct {
	src       string
	at        int
	lineStart bool // the text begins a line
	out       []segment
}

// lex cuts a template.
func lex(src string) ([]segment, error) {
	if len(src) > maxTemplate {
		return nil, fmt.Errorf("%d bytes; at most %d are read", len(src), maxTemplate)
	}
	if !utf8.ValidString(src) || strings.ContainsAny(src, mark+endMark) {
		return nil, fmt.Errorf("not UTF-8, or with the characters U+FDD0 or U+FDD1")
	}
	src = strings.ReplaceAll(strings.ReplaceAll(src, "\r\n", "\n"), "\r", "\n")
	l := &lexer{src: strings.TrimSuffix(src, "\n"), lineStart: true}
	for l.at < len(l.src) {
		if err := l.next(); err != nil {
			return nil, fmt.Errorf("line %d: %w", l.line(), err)
		}
	}
	return l.out, nil
}

func (l *lexer) line() int { return 1 + strings.Count(l.src[:l.at], "\n") }

// next reads a text and the tag after it.
func (l *lexer) next() error {
	start, end := l.at, len(l.src)
	for i := l.at; i+1 < len(l.src); i++ {
		if l.src[i] == '{' && strings.IndexByte("{%#", l.src[i+1]) >= 0 {
			end = i
			break
		}
	}
	if l.at = end; end == len(l.src) {
		l.add(l.src[start:])
		return nil
	}
	kind, sign := l.src[end+1], byte(0)
	if l.at += 2; l.at < len(l.src) && (l.src[l.at] == '-' || l.src[l.at] == '+') {
		sign = l.src[l.at]
		l.at++
	}
	l.add(l.trimmed(l.src[start:end], kind, sign))
	switch kind {
	case '#':
		n := strings.Index(l.src[l.at:], "#}")
		if n < 0 {
			return fmt.Errorf("the comment has no end")
		}
		if l.at += n; l.src[l.at-1] == '-' || l.src[l.at-1] == '+' {
			l.at--
		}
		l.end("#}", true)
		return nil
	case '%':
		if ok, err := l.raw(); ok || err != nil {
			return err
		}
	}
	s := segment{kind: kind, line: l.line()}
	var err error
	if s.toks, err = l.tag(map[byte]string{'{': "}}", '%': "%}"}[kind]); err == nil {
		l.out = append(l.out, s)
	}
	return err
}

func (l *lexer) add(text string) {
	if text != "" {
		l.out = append(l.out, segment{kind: 't', text: text, line: l.line()})
	}
}

// trimmed removes white space before a tag.
func (l *lexer) trimmed(text string, kind, sign byte) string {
	if sign == '-' {
		return strings.TrimRightFunc(text, isSpace)
	}
	if at := strings.LastIndexByte(text, '\n') + 1; sign == 0 && kind != '{' && (at > 0 || l.lineStart) &&
		strings.TrimFunc(text[at:], isSpace) == "" {
		return text[:at]
	}
	return text
}

// end passes the end of a tag, and white space after it.
func (l *lexer) end(close string, newline bool) bool {
	rest := l.src[l.at:]
	after, minus := strings.CutPrefix(rest, "-"+close)
	switch {
	case minus:
		after = strings.TrimLeftFunc(after, isSpace)
	case newline && strings.HasPrefix(rest, "+"+close):
		after = rest[3:]
	case strings.HasPrefix(rest, close):
		if after = rest[2:]; newline {
			after = strings.TrimPrefix(after, "\n")
		}
	default:
		return false
	}
	l.at = len(l.src) - len(after)
	l.lineStart = l.src[l.at-1] == '\n'
	return true
}

// raw reads a {% raw %} block, if one begins here.
func (l *lexer) raw() (bool, error) {
	word := func(at int, word string) (int, bool) {
		rest, ok := strings.CutPrefix(strings.TrimLeftFunc(l.src[at:], isSpace), word)
		return len(l.src) - len(strings.TrimLeftFunc(rest, isSpace)), ok
	}
	at, ok := word(l.at, "raw")
	if before := l.at; ok {
		if l.at = at; !l.end("%}", false) {
			l.at = before
			return false, nil
		}
	} else {
		return false, nil
	}
	for start, i, lineStart := l.at, l.at, l.lineStart; ; i++ {
		n := strings.Index(l.src[i:], "{%")
		if n < 0 {
			return true, fmt.Errorf("the raw block has no end")
		}
		i += n
		sign, from := byte(0), i+2
		if from < len(l.src) && (l.src[from] == '-' || l.src[from] == '+') {
			sign = l.src[from]
			from++
		}
		if at, ok := word(from, "endraw"); ok {
			if l.at = at; l.end("%}", true) {
				after := l.lineStart
				l.lineStart = lineStart
				l.add(l.trimmed(l.src[start:i], '%', sign))
				l.lineStart = after
				return true, nil
			}
		}
	}
}

var operators = []string{"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
	">", "<", "=", ".", ":", "|", ","}

// tag reads the tokens of a tag up to its end.
func (l *lexer) tag(close string) (toks []tok, err error) {
	depth := 0
	for l.at < len(l.src) {
		rest := l.src[l.at:]
		c := rest[0]
		switch {
		case depth == 0 && l.end(close, close == "%}"):
			return toks, nil
		case isSpace(rune(c)):
			l.at++
			continue
		case c == '\'' || c == '"':
			s, n, err := quoted(rest)
			if err != nil {
				return nil, err
			}
			l.at += n
			if k := len(toks) - 1; k >= 0 && toks[k].kind == 's' { // neighbours are one string
				toks[k].text += s
				continue
			}
			toks = append(toks, tok{'s', s})
		case c >= '0' && c <= '9':
			n := numberLen(rest)
			toks = append(toks, tok{'0', rest[:n]})
			l.at += n
		case isName(c):
			n := 1
			for n < len(rest) && (isName(rest[n]) || rest[n] >= '0' && rest[n] <= '9') {
				n++
			}
			toks = append(toks, tok{'n', rest[:n]})
			l.at += n
		default:
			k := slices.IndexFunc(operators, func(op string) bool { return strings.HasPrefix(rest, op) })
			if k < 0 {
				return nil, fmt.Errorf("unexpected %.10q", rest)
			}
			op := operators[k]
			if strings.Contains("([{", op) {
				depth++
			} else if strings.Contains(")]}", op) {
				depth--
			}
			toks = append(toks, tok{'o', op})
			l.at += len(op)
		}
		if len(toks) > maxTokens || depth < 0 {
			return nil, fmt.Errorf("a tag with more than %d tokens, or with a bracket too many", maxTokens)
		}
	}
	return nil, fmt.Errorf("the tag has no end")
}

func isName(c byte) bool { return c == '_' || c|0x20 >= 'a' && c|0x20 <= 'z' }

// numberLen returns the length of a number.
func numberLen(s string) int {
	digits := func(at int) int {
		for at < len(s) && s[at] >= '0' && s[at] <= '9' {
			at++
		}
		return at
	}
	n := digits(0)
	if m := digits(min(n+1, len(s))); n < len(s) && s[n] == '.' && m > n+1 {
		n = m
	}
	if n < len(s) && s[n]|0x20 == 'e' {
		at := n + 1
		if at < len(s) && (s[at] == '+' || s[at] == '-') {
			at++
		}
		if m := digits(at); m > at {
			n = m
		}
	}
	return n
}

// quoted reads a string with Python's escapes.
func quoted(s string) (text string, n int, err error) {
	var b strings.Builder
	for n = 1; n < len(s); n++ {
		switch c := s[n]; {
		case c == s[0]:
			return b.String(), n + 1, nil
		case c != '\\' || n+1 == len(s):
			b.WriteByte(c)
		default:
			n++
			if k := strings.IndexByte("\nabfnrtv\\'\"", s[n]); k >= 0 {
				b.WriteString([]string{"", "\a", "\b", "\f", "\n", "\r", "\t", "\v", "\\", "'", "\""}[k])
				continue
			}
			width := map[byte]int{'x': 2, 'u': 4, 'U': 8}[s[n]]
			if width == 0 && (s[n] >= '0' && s[n] <= '7' || s[n] == 'N') {
				return "", 0, fmt.Errorf("the escape \\%c is not read", s[n])
			}
			if width == 0 {
				b.WriteByte('\\')
				b.WriteByte(s[n])
				continue
			}
			if n+width >= len(s) {
				break
			}
			r, err := strconv.ParseUint(s[n+1:n+1+width], 16, 31)
			if err != nil || !utf8.ValidRune(rune(r)) {
				return "", 0, fmt.Errorf("the escape \\%s is not a character", s[n:n+1+width])
			}
			b.WriteRune(rune(r))
			n += width
		}
	}
	return "", 0, fmt.Errorf("a string has no end")
}

// isSpace reports white space as Python counts it.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }
