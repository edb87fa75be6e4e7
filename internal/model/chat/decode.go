package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

// Decode parses JSON. Maps keep the order of their keys.
func Decode(raw []byte) (jinja.Value, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	v, err := decode(d, 0)
	if err == nil {
		if _, end := d.Token(); end != io.EOF {
			err = errors.New("more than one value")
		}
	}
	return v, err
}

func decode(d *json.Decoder, depth int) (v value, err error) {
	if depth > maxDepth {
		return v, fmt.Errorf("values are more than %d deep inside each other", maxDepth)
	}
	x, err := d.Token()
	if err != nil {
		return v, err
	}
	switch x := x.(type) {
	case json.Delim:
		if x == '[' {
			var list []value
			for err == nil && d.More() {
				v, err = decode(d, depth+1)
				list = append(list, v)
			}
			v = array(list)
		} else {
			v = jinja.NewDict()
			for err == nil && d.More() {
				var key json.Token
				var inner value
				if key, err = d.Token(); err == nil {
					inner, err = decode(d, depth+1)
					v.AsDict().Set(key.(string), inner)
				}
			}
		}
		if err == nil {
			_, err = d.Token()
		}
		return v, err
	case json.Number:
		return decodeNumber(x.String())
	case string:
		return text(x), nil
	case bool:
		return truth(x), nil
	}
	return none(), nil
}

func decodeNumber(s string) (value, error) {
	if !strings.ContainsAny(s, ".eE") {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return none(), fmt.Errorf("the integer %s is too large", s)
		}
		return jinja.NewInt(n), nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return none(), fmt.Errorf("the number %s is too large", s)
	}
	return jinja.NewFloat(f), nil
}
