#include "server/probe/passages.h"

namespace spectrumkv {

const Passage kProse[kPassages] = {
    {"The lighthouse at Carrow Point was built in the autumn of 1842, after the wreck of two grain ships in a single "
     "week. "
     "Its first keeper, a retired carpenter named Thomas Ashby, lived there with his wife and three children for "
     "eleven "
     "years. He kept a careful record of the weather, the passing ships and the oil that the lamp had used, and his "
     "books "
     "are still in the museum of the town. From them we know that the tower was painted white in its second summer, "
     "that "
     "the stairs were replaced after a fire, and that the family grew potatoes and beans behind the wall. When Ashby "
     "died, "
     "his eldest daughter took his place. The harbour board had doubts about a woman in the tower, but",
     " the captains of the fishing boats wrote a letter to say that the light had never failed under her hand, and she "
     "was allowed to stay. She kept the lamp for more than twenty years, and she wrote the record of the weather in "
     "the "
     "same books as her father had done before her. After her death the lighthouse was bought by the town and opened "
     "to the public."},
    {"Bread is made from flour, water, salt and yeast. The flour is mixed with the water first and left to rest for "
     "half an "
     "hour, so that it can take up the moisture. Then the salt and the yeast are added and the dough is kneaded by "
     "hand for "
     "about ten minutes, until it is smooth and no longer sticks to the table. It is put into a bowl, covered with a "
     "cloth "
     "and left in a warm place until it has doubled in size. A cold kitchen makes this slow; a hot one makes it quick, "
     "but the taste is better when the dough has had time. After that it is pressed flat, folded, shaped into a loaf "
     "and",
     " left to rise again for about an hour. The oven must be hot before the bread goes in, because the first minutes "
     "decide how much it will rise. A bowl of water at the bottom of the oven makes steam, and the steam gives the "
     "bread a thin and shiny crust. The loaf is ready when it sounds hollow, and it should be left to cool before it "
     "is "
     "cut with a knife."},
    {"A river does not carry its sand evenly. Where the current is fast it takes up the grains and holds them, and "
     "where the "
     "current is slow it lets them fall. In a bend the water on the outside has the longer way and runs faster, so the "
     "outer bank is worn away, while on the inside of the bend the sand is laid down and a beach grows. Year after "
     "year the "
     "bend moves outward and becomes rounder, until the two ends of the loop are so close to each other that a flood "
     "can "
     "break through the narrow neck of land between them. Then the river takes the short way, and",
     " the old loop is cut off from the current and becomes a lake in the shape of a bow. The lake is slowly filled "
     "with "
     "mud and leaves, and in the end there is only a wet meadow where the river once was. From the air one can see the "
     "traces of many such loops on both sides of the river, one beside the other, and so tell how the river has moved "
     "over the years."},
    {"The town library had three rooms. In the first there were newspapers, which were changed every morning, and a "
     "long "
     "table where old men read them in silence. In the second room there were the books for children, low shelves and "
     "a "
     "carpet on which one was allowed to sit. The third room was the largest, and it was locked. Behind its door stood "
     "the books that a merchant had left to the town a hundred years before, on the condition that nobody should ever "
     "take "
     "one of them out of the house. Whoever wanted to read there had to ask the librarian, Mrs Halloran, for the key. "
     "She "
     "wrote the name of the reader into a book, and the time, and then",
     " she opened the door and went back to her desk. The room was cold and smelled of dust and of old leather. There "
     "was one chair, one table and one lamp, and on the wall there was a picture of the merchant, who looked down at "
     "the reader as if he did not trust him with the books. Very few people ever asked for the key to the room, and "
     "most of them did not come back."},
};

const Passage kPrograms[kPassages] = {
    {"def read_table(path):\n    \"\"\"Reads a file of lines 'name value' into a dictionary.\"\"\"\n    table = {}\n   "
     " with "
     "open(path) as file:\n        for number, line in enumerate(file, 1):\n            line = line.strip()\n          "
     "  "
     "if not line or line.startswith('#'):\n                continue\n            parts = line.split()\n            if "
     "len(parts) != 2:\n                raise ValueError(f'{path}:{number}: expected a name and a value')\n            "
     "name, value = parts\n            if name in table:\n                raise ValueError(f'{path}:{number}: {name} "
     "is "
     "there twice')\n            table[name] = float(value)\n    return table\n\n\ndef write_table(path, table):\n    "
     "\"\"\"Writes a dictionary as lines 'name value'.\"\"\"\n    with open(path, 'w') as file:\n",
     "        for name, value in sorted(table.items()):\n            file.write(f'{name} {value}\\n')\n\n\ndef "
     "largest(table):\n    \"\"\"The name with the largest value.\"\"\"\n    if not table:\n        raise "
     "ValueError('the table is empty')\n    return max(table, key=lambda name: table[name])\n\n\ndef total(table):\n   "
     " "
     "\"\"\"The sum of all values.\"\"\"\n    return sum(table.values())\n"},
    {"class Stack:\n    \"\"\"Last in, first out.\"\"\"\n\n    def __init__(self):\n        self.items = []\n\n    def "
     "push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n        if not self.items:\n           "
     " "
     "raise IndexError('the stack is empty')\n        return self.items.pop()\n\n    def top(self):\n        if not "
     "self.items:\n            raise IndexError('the stack is empty')\n        return self.items[-1]\n\n    def "
     "__len__(self):\n        return len(self.items)\n\n\nclass Queue:\n    \"\"\"First in, first out.\"\"\"\n\n    "
     "def "
     "__init__(self):\n        self.items = []\n\n",
     "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n        if not self.items:\n   "
     "  "
     "       raise IndexError('the queue is empty')\n        return self.items.pop(0)\n\n    def first(self):\n        "
     "if not self.items:\n            raise IndexError('the queue is empty')\n        return self.items[0]\n\n    def "
     "__len__(self):\n        return len(self.items)\n"},
    {"#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n\nstruct node {\n  int key;\n  struct node "
     "*left;\n  "
     "struct node *right;\n};\n\nstruct node *make_node(int key) {\n  struct node *node = malloc(sizeof(struct "
     "node));\n "
     " if (node == NULL) {\n    fprintf(stderr, \"out of memory\\n\");\n    exit(1);\n  }\n  node->key = key;\n  "
     "node->left = NULL;\n  node->right = NULL;\n  return node;\n}\n\nstruct node *insert(struct node *root, int key) "
     "{\n  if (root == NULL) return make_node(key);\n  if (key < root->key) {\n    root->left = insert(root->left, "
     "key);\n  } else if (key > root->key) {\n",
     "    root->right = insert(root->right, key);\n  }\n  return root;\n}\n\nint contains(struct node *root, int key) "
     "{\n "
     " if (root == NULL) return 0;\n  if (key == root->key) return 1;\n  if (key < root->key) return "
     "contains(root->left, key);\n  return contains(root->right, key);\n}\n\nvoid free_tree(struct node *root) {\n  if "
     "(root == NULL) return;\n  free_tree(root->left);\n  free_tree(root->right);\n  free(root);\n}\n"},
    {"CREATE TABLE customers (\n  id INTEGER PRIMARY KEY,\n  name TEXT NOT NULL,\n  city TEXT NOT NULL\n);\n\nCREATE "
     "TABLE "
     "orders (\n  id INTEGER PRIMARY KEY,\n  customer_id INTEGER NOT NULL REFERENCES customers (id),\n  placed_on DATE "
     "NOT "
     "NULL,\n  amount NUMERIC NOT NULL\n);\n\nINSERT INTO customers (id, name, city) VALUES (1, 'Anna', "
     "'Leeds');\nINSERT "
     "INTO customers (id, name, city) VALUES (2, 'Brian', 'York');\nINSERT INTO customers (id, name, city) VALUES (3, "
     "'Clara', 'Leeds');\n\n-- The sum of the orders of each customer\nSELECT customers.name, SUM(orders.amount)\nFROM "
     "customers\n",
     "JOIN orders ON orders.customer_id = customers.id\nGROUP BY customers.name\nORDER BY customers.name;\n\n-- The "
     "number "
     "of customers in each city\nSELECT customers.city, COUNT(*)\nFROM customers\nGROUP BY customers.city\nORDER BY "
     "customers.city;\n\n-- The customers without an order\nSELECT customers.name\nFROM customers\nLEFT JOIN orders ON "
     "orders.customer_id = customers.id\nWHERE orders.id IS NULL;\n"},
};

}  // namespace spectrumkv
