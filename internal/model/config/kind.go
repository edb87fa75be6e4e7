package config

import (
	"cmp"
	"fmt"
	"reflect"
	"time"

	"go.yaml.in/yaml/v3"
)

// A kind is what keys of one Go type have in common.
type kind struct {
	name  string
	read  func(k *key, n *yaml.Node, field any) error
	check func(k *key, field any) error // the bounds of a value
	value func(field any) any           // as JSON has it: bool, int64, float64, string, []any
}

var kinds = map[reflect.Type]kind{} // by the type of a field's pointer; init fills it, since errors name kinds

func (k *key) kind(field any) kind {
	found, ok := kinds[reflect.TypeOf(field)]
	if !ok {
		panic(fmt.Sprintf("config: key %s has a field of type %T", k.path, field))
	}
	return found
}

// addKind makes a type known. A nil check has no bounds.
func addKind[T any](name string, read func(*key, *yaml.Node) (T, error), check func(*key, T) error, value func(T) any) {
	known := kind{
		name: name,
		read: func(k *key, n *yaml.Node, field any) error {
			v, err := read(k, n)
			if err == nil {
				*field.(*T) = v
			}
			return err
		},
		check: func(k *key, field any) error {
			if check == nil {
				return nil
			}
			return check(k, *field.(*T))
		},
		value: func(field any) any { return value(*field.(*T)) },
	}
	kinds[reflect.TypeFor[*T]()] = known
}

// optional makes the form of a type known in which nil is the key's word.
func optional[T any](name string, read func(*key, *yaml.Node) (T, error), check func(*key, T) error) {
	addKind(name, func(k *key, n *yaml.Node) (*T, error) {
		v, err := read(k, n)
		return &v, err
	}, func(k *key, p *T) error {
		if check == nil {
			return nil
		}
		return check(k, *p)
	}, func(p *T) any { return *p })
}

func same[T any](v T) any { return v }

func init() {
	addKind("integer", func(k *key, n *yaml.Node) (int, error) { v, err := k.integer(n); return int(v), err },
		func(k *key, v int) error { return k.checkInt(int64(v)) }, func(v int) any { return int64(v) })
	addKind("integer", (*key).integer, (*key).checkInt, same[int64])
	addKind("number", (*key).number, (*key).checkFloat, same[float64])
	optional("number", (*key).number, (*key).checkFloat)
	addKind("true or false", (*key).boolean, nil, same[bool])
	optional[bool]("true or false", (*key).boolean, nil)
	addKind("text", (*key).text, (*key).checkWord, same[string])
	addKind("time", (*key).duration, (*key).checkTime, func(d time.Duration) any { return FormatTime(d) })
	addKind("list of two numbers", (*key).pair, func(k *key, v [2]float64) error {
		return cmp.Or(k.checkFloat(v[0]), k.checkFloat(v[1]))
	}, func(v [2]float64) any { return []any{v[0], v[1]} })
	addKind("list", (*key).list, func(k *key, list []string) error {
		for i, word := range list {
			if err := k.choose(word); err != nil {
				return fmt.Errorf("entry %d: %w", i+1, err)
			}
		}
		return nil
	}, func(list []string) any {
		all := make([]any, len(list))
		for i, s := range list {
			all[i] = s
		}
		return all
	})
	addKind("a share such as 3%, a size, or auto", (*key).reserve, nil, func(r Reserve) any { return string(r) })
	addKind("text or a list of texts or of {path, weight}", (*key).files, nil, Files.value)
}
